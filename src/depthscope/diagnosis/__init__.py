"""A profile in, a verdict out: the rules in one table."""

from depthscope.diagnosis.fixing import Fixed, fix
from depthscope.diagnosis.judge import diagnose
from depthscope.diagnosis.references import reference_for
from depthscope.diagnosis.verdict import Diagnosis, Verdict
from depthscope.usage import Finding

__all__ = ["Diagnosis", "Finding", "Fixed", "Verdict", "diagnose", "fix", "reference_for"]
