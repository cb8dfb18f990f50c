"""How MiCRO's threshold follows the density: as published, repaired, and agreed by all ranks within the step."""
