"""Recipes: networks and posteriors for tables, for those who do not want to choose them."""

from dapcal.recipes.division import divide
from dapcal.recipes.fitting import Fitted, fit
from dapcal.recipes.intervals import Bounds
from dapcal.recipes.posteriors import POSTERIORS
from dapcal.recipes.recipe import NAMES, Recipe, network, numbers_of, size

__all__ = ["NAMES", "POSTERIORS", "Bounds", "Fitted", "Recipe", "divide", "fit", "network", "numbers_of", "size"]
