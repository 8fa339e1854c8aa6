"""What gives rewards."""
