"""Other tools at hand of an attachment; each file imports its tool nowhere, it works on the object that you give it."""
