"""What follows from measurements for prices: of the parts that were measured, and of whole classes of operations."""
