"""Refusals: what a function may not do while it is captured, said with the line that does it.

A graph repeats the operators that were traced. Whatever else the function did, or decided, was done
once; here that is found out, so that no graph is kept that would tell another story than the
function. What Python can run all the same is marked as fit for the dynamic rung.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import optree
import torch
from torch.overrides import TorchFunctionMode

from zfunc.capture import compat
from zfunc.errors import CaptureError, explain

__all__ = [
    "OwnWeights",
    "explained",
    "explained_calls",
    "line_of_change",
    "line_of_stack",
    "moved_generator",
    "own_draw",
]

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    folder + os.sep for folder in (_HERE, *map(os.path.dirname, (torch.__file__, optree.__file__)))
)
_OWN_WEIGHTS = (
    "torch.utils.checkpoint computes again after torch.func.functional_call has ended, with the"
    " module's own weights: use zfunc.remat in the module instead"
)
_TRACE = os.path.join(_HERE, "capture", "trace.py")
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turns what tracing raises about a function that is not fit for it into a `CaptureError`."""
    try:
        yield
    except compat.DATA_DEPENDENT as error:
        raise CaptureError(
            explain(
                f"Python control flow depends on a tensor's value at {_line_of(error)}",
                expected="operators only, such as torch.where",
                got=str(error),
                do="keep the value a tensor, or decide outside and pass the choice in the batch",
            ),
            runs_dynamic=True,
        ) from error
    except compat.UNSUPPORTED as error:
        raise CaptureError(
            explain(
                f"an operator has no shapes without data at {_line_of(error)}",
                expected="operators that can be traced",
                got=str(error),
                do="register a fake kernel for it with torch.library.register_fake",
            ),
            runs_dynamic=True,
        ) from error
    except AssertionError as error:
        if not compat.is_fake_refusal(error):
            raise
        raise _captured_tensor(error) from error
    except Exception as error:
        if not compat.is_compiler_refusal(error):
            raise
        raise CaptureError(
            explain(
                f"torch's compiler does not run inside of a trace at {_line_of(error)}",
                expected="operators, without torch.compile, torch.cond, while_loop or scan",
                got=str(error).splitlines()[0],
                do="leave out torch.compile: the whole step is traced; write choices with"
                " torch.where",
            ),
            runs_dynamic=True,
        ) from error


def _captured_tensor(error: BaseException) -> CaptureError:
    """A tensor met the traced ones that is none of the arguments."""
    do = "pass it in the batch, or as a frozen leaf of the parameters"
    if any(frame.filename.endswith("utils/checkpoint.py") for frame in _frames(error)):
        do = _OWN_WEIGHTS
    return CaptureError(
        explain(
            f"the function uses a tensor that is not an argument at {_line_of(error)}",
            expected="every tensor passed through params or batch",
            got=str(error).split("Found in")[-1].strip(),
            do=do,
        )
    )


def moved_generator(name: str, line: str) -> CaptureError:
    """Python drew from a global generator, or seeded it."""
    return CaptureError(
        explain(
            f"the function moves {name}'s generator from Python at {line}",
            expected="random numbers that are part of the graph",
            got=f"a changed state of {name}'s generator: later steps would repeat one draw",
            do="draw with zfunc.random from a `key` argument, or pass numbers in the batch",
        )
    )


def own_draw(op: object, line: str) -> CaptureError:
    """An operator drew from a generator whose state is the function's own."""
    return CaptureError(
        explain(
            f"{op} draws from a torch.Generator or a seed of the function's own at "
            f"{line or 'its derivative'}",
            expected="the global generator as it is, or zfunc.random with a `key` argument",
            do="add `*, key` to the function and draw with zfunc.random; where it is "
            "torch.utils.checkpoint that repeats a draw, wrap the block with zfunc.remat instead",
        ),
        runs_dynamic=True,
    )


@contextlib.contextmanager
def explained_calls() -> Iterator[None]:
    """Explains what torch refuses in a loss that is called as it is, as a `CaptureError`.

    That is a write into a parameter, and `torch.func` inside of a recomputed block.
    """
    try:
        yield
    except RuntimeError as error:
        if compat.is_hook_refusal(error):
            raise CaptureError(
                explain(
                    f"the loss transforms a function inside of a remat at {_line_of(error)}",
                    expected="no torch.func inside of a remat, on the dynamic rung",
                    got=str(error),
                    do="use torch.autograd.grad there, leave out that remat, or write the loss so"
                    " that it can be traced",
                )
            ) from error
        if not compat.is_leaf_write(error):
            raise
        raise CaptureError(
            explain(
                f"the loss writes into a parameter in place at {_line_of(error)}",
                expected="a function without side effects",
                do="clone before writing, or return the new value (has_aux=True)",
            )
        ) from error


class OwnWeights(TorchFunctionMode):
    """Refuses, in a backward pass, operators on a module's own weights.

    What is differentiated are plain tensors, so only a recomputation can read a `Parameter` there:
    of a module whose weights were other tensors in the forward pass.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, torch.nn.Parameter) for x in (*args, *(kwargs or {}).values())):
            raise CaptureError(
                explain(
                    f"the backward pass reads a module's own weights at {line_of_stack()}",
                    expected="the parameters that the loss was called with",
                    got=getattr(func, "__name__", func),
                    do=_OWN_WEIGHTS,
                )
            )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def line_of_change(read: Callable[[], Any]) -> Iterator[list[str]]:
    """Watches the user's code until a line changes something.

    Args:
        read: what to watch.

    Yields:
        A list that holds the line at the end.
    """
    before, found, last = read(), [], "an unknown line"

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last
        if not found and read() != before:
            found.append(last)
        if _is_library(frame.f_code.co_filename):
            return None
        # What is left returns into the middle of a line of its caller.
        running = frame.f_back if event == "return" else frame
        if running is not None and not _is_library(running.f_code.co_filename):
            last = f"{running.f_code.co_filename}:{running.f_lineno}"
        return watch

    outer = sys.gettrace()
    sys.settrace(watch)
    try:
        yield found
    finally:
        sys.settrace(outer)
        found.append(last)


def line_of_stack() -> str:
    """The innermost line of the function being traced; empty in its derivative."""
    for frame, number in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if file == _TRACE:
            return ""
        if not _is_library(file):
            return f"{file}:{number}"
    return ""


def _line_of(error: BaseException) -> str:
    """The innermost line of a traceback that is the user's."""
    lines = [f"{f.filename}:{f.lineno}" for f in _frames(error) if not _is_library(f.filename)]
    return lines[-1] if lines else "an unknown line"


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def _is_library(filename: str) -> bool:
    installed = "site-packages" in filename
    return filename.startswith(("<", *_LIBRARIES)) or (
        filename.startswith(_STANDARD) and not installed
    )
