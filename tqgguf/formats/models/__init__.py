"""What belongs to a model: its configuration, fingerprints, calibrations."""
