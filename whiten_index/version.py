"""The release, which manifests name."""

VERSION = "0.1.0"
