"""Fair comparisons of narrow models: many seeds trained as one model, tasks that need depth, and what seeds can tell.

facts = Facts(8192)
block = BlockConfig(16, 2, 32, placement=pre_norm)
variants = {"pre": lambda seed: Reader(48, block, facts.tokens, seed)}
results = compare(facts, variants, budgets_of(1500), Path("runs"))
"""

from depthscope_lab.fair.facts import Facts, Reader, Table, equal_width
from depthscope_lab.fair.protocol import Plan, Result, budgets_of, compare, losses_of, screened
from depthscope_lab.fair.separation import Difference, Standing, holm, paired_difference, standings
from depthscope_lab.fair.stacked import Stacked
from depthscope_lab.fair.together import Budget, Member, Problem, Together, steps_to

__all__ = [
    "Budget",
    "Difference",
    "Facts",
    "Member",
    "Plan",
    "Problem",
    "Reader",
    "Result",
    "Stacked",
    "Standing",
    "Table",
    "Together",
    "budgets_of",
    "compare",
    "equal_width",
    "holm",
    "losses_of",
    "paired_difference",
    "screened",
    "standings",
    "steps_to",
]
