"""Rules for MiCRO's threshold: as published, or agreed by all ranks within the step."""
