"""Parts of the report page for the paper's sections."""
