//! Systems of some ten unknowns, solved entry by entry.

/// Solves a positive definite system by Cholesky; nothing where it is not positive definite in double precision.
pub(crate) fn solve_positive(
    n: usize,
    matrix: impl Fn(usize, usize) -> f64,
    right: impl Fn(usize) -> f64,
) -> Option<Vec<f64>> {
    let mut l = vec![0.0; n * n];
    for i in 0..n {
        for j in 0..=i {
            let mut sum = matrix(i, j);
            for k in 0..j {
                sum -= l[i * n + k] * l[j * n + k];
            }
            if i == j {
                // Written so that NaN fails too.
                if !(sum > 0.0) {
                    return None;
                }
                l[i * n + i] = sum.sqrt();
            } else {
                l[i * n + j] = sum / l[j * n + j];
            }
        }
    }
    let mut x: Vec<f64> = (0..n).map(right).collect();
    for i in 0..n {
        for k in 0..i {
            x[i] -= l[i * n + k] * x[k];
        }
        x[i] /= l[i * n + i];
    }
    for i in (0..n).rev() {
        for k in i + 1..n {
            x[i] -= l[k * n + i] * x[k];
        }
        x[i] /= l[i * n + i];
    }
    Some(x)
}
