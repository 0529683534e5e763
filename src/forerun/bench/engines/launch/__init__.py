"""How each engine is launched: one TOML file for each, which users can print, change and give back."""
