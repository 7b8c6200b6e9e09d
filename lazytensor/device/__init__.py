"""The device ltc: registration, kernels, factories, copies, random numbers."""
