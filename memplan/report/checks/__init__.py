"""Answers of budget checks, also in the formats that code forges and test reports read."""
