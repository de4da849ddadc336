"""From YAML to a checked, typed, immutable config: schema, composition, rules, identity of settings, hints."""
