"""Running programs: generated segments, the loop over ops, the exchange at the commit point."""

from zfunc.execute.executor import Executor, Inputs, Outcome
from zfunc.execute.interrupt import Interrupts, deferred_interrupts
from zfunc.execute.status import Verdict, sum_over_ranks

__all__ = [
    "Executor",
    "Inputs",
    "Interrupts",
    "Outcome",
    "Verdict",
    "deferred_interrupts",
    "sum_over_ranks",
]
