"""Small trainable modules on frozen features; each scores images against texts."""
