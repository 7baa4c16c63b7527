"""The core's solvers in torch: the same algorithms on any device, many rows of many layers in one step.

| file | twin of |
| --- | --- |
| `grid` | grid/: values of codes, types of scales, the search for scales |
| `factor` | factor/: the damped Hessian, its order of columns and its factor |
| `sweep` | gptq/: one code a column |
| `beam` | gptq/beam: several paths of codes |
| `descent` | coordinate/descent: codes and scales one at a time |
| `settle` | coordinate/settle: all stages in turn |
| `coupled` | coordinate/coupled: the same under a metric between outputs |
| `solve` | from problems to layers |

Every tensor begins with the inputs, L: layers that share S share one; then rows, then columns. Factors, gradients,
errors and losses are in double precision, paths of a beam in single precision, as in the core.
"""
