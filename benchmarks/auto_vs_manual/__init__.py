"""The search's plans beside those that experts write: the models, the recipes, and the rows of each suite."""
