"""What Laplace approximations share: sums of curvature over the data, their structures, the choice of a prior scale."""
