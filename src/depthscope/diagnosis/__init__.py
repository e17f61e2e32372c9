"""A profile in, a verdict out: the rules in one table."""

from depthscope.diagnosis.judge import diagnose
from depthscope.diagnosis.references import reference_for
from depthscope.diagnosis.verdict import Diagnosis, Finding, Recommendation, Verdict

__all__ = ["Diagnosis", "Finding", "Recommendation", "Verdict", "diagnose", "reference_for"]
