"""What runs, in which order, on which schedule. Nothing is computed here."""
