"""Running programs: generated segments, the loop over ops, the exchange at the commit point."""

from zfunc.execute.executor import Executor, Inputs, Outcome
from zfunc.execute.status import Verdict, sum_over_ranks

__all__ = ["Executor", "Inputs", "Outcome", "Verdict", "sum_over_ranks"]
