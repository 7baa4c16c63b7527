"""What a setting is: its declaration, registries, patterns of names, steps, and how work is carried out."""
