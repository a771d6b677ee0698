"""The no-harm benchmark: many cases, each before and after `dapcal.calibrate` with all defaults."""
