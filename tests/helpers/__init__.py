"""What several tests need, and no fixture is."""
