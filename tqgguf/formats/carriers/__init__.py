"""All file formats that hold snapshots, in one table."""
