"""The compiled kernels. Nothing is checked here but list lengths: call them through `zfunc.ops`."""

ABI: int

def isas() -> list[str]: ...
def adamw(
    isa: str,
    dtype: int,
    params: list[int],
    grads: list[int],
    mu: list[int],
    nu: list[int],
    counts: list[int],
    step_size: list[float],
    nu_scale: list[float],
    decay: list[float],
    b1: float,
    b2: float,
    eps: float,
    grad_scale: float,
    threads: int,
) -> None: ...
def sum_squares(
    isa: str, dtypes: list[int], tensors: list[int], counts: list[int], out: int, threads: int
) -> None: ...
def nonfinite(
    isa: str, dtypes: list[int], tensors: list[int], counts: list[int], threads: int
) -> bool: ...
