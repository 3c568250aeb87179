"""Metrics of the services, by OpenTelemetry."""
