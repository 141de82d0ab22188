"""The training engines: what each keeps, does in a step, loads and saves. One folder per engine."""
