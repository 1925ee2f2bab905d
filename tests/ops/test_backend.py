"""Which kernels run is decided by the environment, and a wrong build is an error, not garbage."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from zfunc import ops
from zfunc.ops import backend

ADAM = {"lr": 0.1, "b1": 0.9, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 1}


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter with these variables set."""
    command = [sys.executable, "-W", "error", "-c", code]
    env = {k: v for k, v in os.environ.items() if not k.startswith("ZFUNC_")} | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_the_extension_is_there_when_it_is_required() -> None:
    if os.environ.get("ZFUNC_REQUIRE_NATIVE") == "1":
        assert ops.has_native()
    elif not ops.has_native():
        pytest.skip("no compiled kernels, and ZFUNC_REQUIRE_NATIVE is not set")
    assert ops.isas()[0] == "scalar"


def test_native_0_never_loads_the_extension() -> None:
    code = (
        "import sys\nfrom zfunc import ops\n"
        "assert not ops.has_native() and ops.isas() == ()\n"
        "assert 'zfunc.ops._native' not in sys.modules"
    )
    done = run(code, ZFUNC_NATIVE="0")
    assert done.returncode == 0, done.stderr


def test_require_native_refuses_a_missing_extension() -> None:
    code = "import sys\nsys.modules['zfunc.ops._native'] = None\nfrom zfunc import ops\n"
    done = run(code, ZFUNC_REQUIRE_NATIVE="1")
    assert done.returncode != 0
    assert "ZFUNC_REQUIRE_NATIVE=1 asks for it; rebuild it with" in done.stderr
    fallback = run(code + "assert not ops.has_native()")
    assert fallback.returncode == 0, fallback.stderr


def test_a_stale_build_is_refused() -> None:
    code = (
        "import sys, types\n"
        "stale = types.ModuleType('zfunc.ops._native')\n"
        "stale.ABI = 0\n"
        "sys.modules['zfunc.ops._native'] = stale\n"
        "import zfunc.ops\n"
    )
    done = run(code)
    assert done.returncode != 0
    assert f"expected ABI {backend.ABI}, got 0; rebuild it with" in done.stderr


def test_native_can_be_switched_off_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFUNC_NATIVE", "0")
    assert not ops.has_native()
    assert torch.equal(ops.sum_squares([torch.ones(3)]), torch.tensor([3.0]).double())


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ops.has_native():
        pytest.skip("no compiled kernels")
    monkeypatch.setenv("ZFUNC_ISA", "mmx")
    with pytest.raises(ValueError, match=r"ZFUNC_ISA: expected one of scalar.*, got 'mmx'"):
        ops.sum_squares([torch.ones(3)])
    x = torch.ones(3)
    with pytest.raises(ValueError, match="ZFUNC_ISA"):
        ops.adamw_(x, torch.ones(3), torch.zeros(3), torch.zeros(3), **ADAM)
    assert torch.equal(x, torch.ones(3))


def test_the_default_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ops.has_native():
        pytest.skip("no compiled kernels")
    monkeypatch.delenv("ZFUNC_ISA", raising=False)
    assert backend.isa() == ops.isas()[-1]
