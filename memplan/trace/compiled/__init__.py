"""What does a compiled module take? Its forward and backward run as the programs that torch's compiler writes for CUDA."""
