"""Ways of scoring images against texts: one protocol (`base`), one table of names (`registry`)."""
