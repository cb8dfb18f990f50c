"""What values look like on the wire: one file per form."""
