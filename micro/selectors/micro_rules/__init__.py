"""How MiCRO's threshold follows the density: as published, and agreed by all ranks within the step."""
