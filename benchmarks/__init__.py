"""What tfm-export is measured against, and how."""
