"""Workers: processes of their own."""
