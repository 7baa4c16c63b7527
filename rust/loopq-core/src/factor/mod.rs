//! Factorisations of `H`.
//!
//! Every solver here needs, for a column that is rounded, how its error is best made up for in the columns still to
//! come. That is one matrix, `A`, unit upper triangular, of `S = H + diag(mu) = A diag(p) A^T`: the factorisation that
//! J. Chee et al., *QuIP* (2023, arXiv:2307.13304), show to be what GPTQ computes. It is found by a Cholesky
//! factorisation with the indices turned round; only the search for an order forms an inverse.
//!
//! | file | what it does |
//! |---|---|
//! | `panels` | how a triangle lies in memory |
//! | `cholesky` | `S = R R^T`, `R` upper, in place; also with signs |
//! | `ldl` | `S = A diag(p) A^T`, and solving with it |
//! | `inverse` | `S^-1` from it |
//! | `ordering` | in which order columns are taken |
//! | `damped` | the object that solvers share: damping, order, factor |
//! | `lanczos` | the largest eigenvalue |
//! | `count` | how many eigenvalues lie above a bound |
//! | `eigen` | all eigenvalues |

mod cholesky;
mod count;
mod damped;
mod eigen;
mod inverse;
mod lanczos;
mod ldl;
mod ordering;
mod panels;
mod symmetric;

pub use count::{count_above, Counts};
pub(crate) use damped::Square;
pub use damped::{DampedFactor, DampedHessian};
pub use eigen::eigvalsh;
pub use ordering::{Order, PIVOTS};
pub(crate) use panels::PANEL_WIDTH;
pub use symmetric::Symmetric;
