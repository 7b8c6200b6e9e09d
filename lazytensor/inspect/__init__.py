"""Why: ledgers, blame, explanations, metrics, dumps and the report."""
