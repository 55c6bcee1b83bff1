"""Ways of scoring images against texts, behind one protocol (``base``) and one table of names (``registry``)."""
