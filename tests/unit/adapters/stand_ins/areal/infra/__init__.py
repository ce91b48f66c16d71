"""What runs workflows."""
