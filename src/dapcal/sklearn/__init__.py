"""Estimators for scikit-learn: a classifier and a regressor that know how far an input lies from their data.

There is no `decision_function`: scikit-learn keeps it for the scores of classes in classifiers and refuses it in
regressors. Whether an input is out of distribution is said by `ood_decision_function`, `ood_p_value`, `is_ood` and
`score_samples`.
"""

try:
    import sklearn as _  # noqa: F401
except ImportError as error:
    raise ImportError("dapcal.sklearn needs scikit-learn; install it with: pip install 'dapcal[sklearn]'") from error

from dapcal.sklearn.classifier import DistanceAwareClassifier
from dapcal.sklearn.regressor import DistanceAwareRegressor

__all__ = ["DistanceAwareClassifier", "DistanceAwareRegressor"]
