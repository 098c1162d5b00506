"""The sub-commands of ``continuum trace`` that analyse: flags in, text or JSON out."""
