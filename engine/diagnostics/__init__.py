"""What an encoder's layers hold, read from frozen features."""
