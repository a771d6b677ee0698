"""Recipes: networks and posteriors for tables, for those who do not want to choose them."""

from dapcal.recipes.bounds import Bounds, Limits, in_network_unit, limits_of
from dapcal.recipes.division import divide, training_places
from dapcal.recipes.fitting import Fitted, fit
from dapcal.recipes.intervals import few_judges
from dapcal.recipes.logarithm import Logarithm, logarithm, may_be_logarithmic, smearing_of
from dapcal.recipes.many_rows import trained_on
from dapcal.recipes.posteriors import POSTERIORS
from dapcal.recipes.recipe import ESTIMATOR, NAMES, Recipe, network, numbers_of, size
from dapcal.recipes.refit import REFITTED

__all__ = [
    "ESTIMATOR",
    "NAMES",
    "POSTERIORS",
    "REFITTED",
    "Bounds",
    "Fitted",
    "Limits",
    "Logarithm",
    "Recipe",
    "divide",
    "few_judges",
    "fit",
    "in_network_unit",
    "limits_of",
    "logarithm",
    "may_be_logarithmic",
    "network",
    "numbers_of",
    "size",
    "smearing_of",
    "trained_on",
    "training_places",
]
