"""The sub-commands of ``continuum trace`` that analyze: flags in, text or JSON out."""
