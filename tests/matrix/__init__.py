"""What people combine: precision × program × framework × mode, each compared with one device."""
