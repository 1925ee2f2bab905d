"""The Program as data (`ir`), as text, as a digest, and on paper: its bytes and its time.

Nothing here runs a program or changes one; passes and the executor do.
"""

from zfunc.program.cost import Cost, cost_analysis, op_seconds
from zfunc.program.ir import Program
from zfunc.program.memory import Memory, memory_analysis
from zfunc.program.text import as_text

__all__ = [
    "Cost",
    "Memory",
    "Program",
    "as_text",
    "cost_analysis",
    "memory_analysis",
    "op_seconds",
]
