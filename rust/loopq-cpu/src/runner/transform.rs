//! Changes of basis of a weight's inputs: the weight multiplies `T x`.
//!
//! `T` has blocks along its diagonal, and each block is a Kronecker product. A factor reads a block as a matrix (its
//! size, rest), multiplies the first axis and writes (rest, its size). So the axes are back in order after the last
//! factor, and each factor runs along numbers that lie side by side.
//!
//! All sums are float32 in a fixed order, the same for any instruction set and any number of tokens.

use super::vector::Number;
use loopq_core::memory::{copied, zeros};
use loopq_core::simd::{per_isa, Isa};
use loopq_core::{dims, Error, Result};

/// Outputs of a dense factor that are summed side by side, and columns for which this happens at once.
const LANES: usize = 16;
const COLUMNS: usize = 4;

/// A factor of a block.
#[derive(Clone, Debug, PartialEq)]
pub struct Factor {
    n: usize,
    kind: Kind,
    /// Factor of the results.
    by: f32,
}

/// Dense factors are stored in panels of [`LANES`] outputs, (panels, inputs), with zeros for missing outputs.
#[derive(Clone, Debug, PartialEq)]
enum Kind {
    /// Hadamard's matrix of a power of two in Sylvester's order, by the signs of its columns.
    Sylvester(Vec<f32>),
    /// Numbers of one magnitude.
    Signs(Vec<[i8; LANES]>),
    Numbers(Vec<[f32; LANES]>),
    /// A diagonal matrix, by its inverse.
    Divisors(Vec<f32>),
}

impl Factor {
    /// A matrix, (n, n). Matrices of Hadamard's kind are recognised, because they are applied faster.
    pub fn matrix(n: usize, values: &[f32]) -> Result<Self> {
        dims::check_matrix("a factor of an input transform", values, n, n)?;
        let by = values.first().map_or(0.0, |v| v.abs());
        if by == 0.0 || values.iter().any(|v| v.abs() != by) {
            return Ok(Self { n, kind: Kind::Numbers(panels(n, values, |v| v)?), by: 1.0 });
        }
        // Its first row has no other sign.
        let sign = |i: usize| values[i % n] < 0.0;
        let odd = |i: usize| ((i / n) & (i % n)).count_ones() % 2 == 1;
        let same = |(i, &v): (usize, &f32)| (v < 0.0) == (odd(i) != sign(i));
        let kind = if n.is_power_of_two() && values.iter().enumerate().all(same) {
            let mut signs = zeros("signs of an input transform", n)?;
            signs.iter_mut().zip(values).for_each(|(to, v)| *to = if *v < 0.0 { -1.0 } else { 1.0 });
            Kind::Sylvester(signs)
        } else {
            Kind::Signs(panels(n, values, |v| if v < 0.0 { -1 } else { 1 })?)
        };
        Ok(Self { n, kind, by })
    }

    /// A diagonal matrix that divides each input by its number.
    pub fn divisors(values: &[f32]) -> Result<Self> {
        let kind = Kind::Divisors(copied("divisors of inputs", values)?);
        Ok(Self { n: values.len(), kind, by: 1.0 })
    }
}

fn panels<T: Number + bytemuck::Pod>(
    n: usize,
    values: &[f32],
    of: impl Fn(f32) -> T,
) -> Result<Vec<[T; LANES]>>
where
    [T; LANES]: bytemuck::Pod,
{
    let mut panels =
        zeros("a factor of an input transform", dims::product("a factor", n.div_ceil(LANES), n)?)?;
    for (i, row) in values.chunks_exact(n.max(1)).enumerate() {
        for (to, &v) in panels[i / LANES * n..].iter_mut().zip(row) {
            let to: &mut [T; LANES] = to;
            to[i % LANES] = of(v);
        }
    }
    Ok(panels)
}

/// Some equal blocks side by side.
#[derive(Clone, Debug, PartialEq)]
struct Part {
    count: usize,
    size: usize,
    factors: Vec<Factor>,
}

/// A change of basis of a weight's inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Transform {
    parts: Vec<Part>,
    inputs: usize,
}

impl Transform {
    /// Blocks along the diagonal: how many of a kind, and the factors of each.
    pub fn new(blocks: Vec<(usize, Vec<Factor>)>) -> Result<Self> {
        const WHAT: &str = "an input transform";
        let (mut inputs, mut parts) = (0, Vec::new());
        for (count, factors) in blocks {
            let size = factors.iter().try_fold(1, |size, factor| dims::product(WHAT, size, factor.n))?;
            if count == 0 || size == 0 {
                return Err(Error::shape(WHAT, "1 or more blocks and inputs", format!("{count} of {size}")));
            }
            inputs = dims::sum(WHAT, inputs, dims::product(WHAT, count, size)?)?;
            parts.push(Part { count, size, factors });
        }
        Ok(Self { parts, inputs })
    }

    /// Number of inputs.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// `T x` for tokens one after another.
    pub(super) fn apply(&self, x: &[f32], isa: Isa) -> Result<Vec<f32>> {
        const WHAT: &str = "transformed inputs";
        let mut out = copied(WHAT, x)?;
        // Blocks of one matrix without multiplications stay where they are.
        if let [Part { size, factors, .. }] = &self.parts[..] {
            if let [Factor { kind: Kind::Sylvester(signs), by, .. }] = &factors[..] {
                debug_assert_eq!(*size, signs.len());
                signed_sums(isa, signs, *by, &mut out);
                return Ok(out);
            }
        }
        let size = dims::product(WHAT, COLUMNS, self.inputs)?.min(x.len());
        let longest = self.parts.iter().flat_map(|p| &p.factors).map(|f| f.n).max().unwrap_or(0);
        let mut columns = zeros(WHAT, longest)?;
        let [mut blocks, mut turned] = [zeros(WHAT, size)?, zeros(WHAT, size)?];
        // Tokens share a pass over a factor where a block has fewer columns.
        for tokens in out.chunks_mut(size.max(1)) {
            let mut first = 0;
            for part in &self.parts {
                let width = part.count * part.size;
                let rows = tokens.len() / self.inputs * width;
                let (blocks, turned) = (&mut blocks[..rows], &mut turned[..rows]);
                for (to, token) in blocks.chunks_exact_mut(width).zip(tokens.chunks_exact(self.inputs)) {
                    to.copy_from_slice(&token[first..first + width]);
                }
                for factor in &part.factors {
                    turn(isa, factor, part.size, blocks, turned, &mut columns[..factor.n]);
                }
                for (from, token) in blocks.chunks_exact(width).zip(tokens.chunks_exact_mut(self.inputs)) {
                    token[first..first + width].copy_from_slice(from);
                }
                first += width;
            }
        }
        Ok(out)
    }
}

per_isa! {
    /// Multiplies blocks by Sylvester's matrix with signs of its columns, and by a number.
    fn signed_sums(signs: &[f32], by: f32, x: &mut [f32]) = signed_sums_body;
}

#[inline(always)]
fn signed_sums_body(signs: &[f32], by: f32, x: &mut [f32]) {
    for x in x.chunks_exact_mut(signs.len()) {
        for (x, sign) in x.iter_mut().zip(signs) {
            *x *= sign;
        }
        butterflies(x, 1);
        for x in x {
            *x *= by;
        }
    }
}

per_isa! {
    /// Applies a factor to blocks of a size in `x`. `y` and `columns` are room for as many numbers and rows.
    fn turn(factor: &Factor, size: usize, x: &mut [f32], y: &mut [f32], columns: &mut [[f32; COLUMNS]]) = turn_body;
}

#[inline(always)]
fn turn_body(factor: &Factor, size: usize, x: &mut [f32], y: &mut [f32], columns: &mut [[f32; COLUMNS]]) {
    let rest = size / factor.n;
    match &factor.kind {
        Kind::Sylvester(signs) if rest == 1 => return signed_sums_body(signs, factor.by, x),
        Kind::Sylvester(signs) => {
            for x in x.chunks_exact_mut(size) {
                for (x, sign) in x.chunks_exact_mut(rest).zip(signs) {
                    for x in x {
                        *x *= sign;
                    }
                }
                butterflies(x, rest);
            }
            transpose(x, rest, size, y);
        }
        Kind::Divisors(divisors) => {
            for x in x.chunks_exact_mut(size) {
                for (x, by) in x.chunks_exact_mut(rest).zip(divisors) {
                    for x in x {
                        *x /= by;
                    }
                }
            }
            transpose(x, rest, size, y);
        }
        Kind::Signs(panels) => multiply(panels, rest, x, y, columns),
        Kind::Numbers(panels) => multiply(panels, rest, x, y, columns),
    }
    for (x, y) in x.iter_mut().zip(&*y) {
        *x = y * factor.by;
    }
}

/// Sums and differences at distance `n`, then at twice that, and so on up to all of `x`.
#[inline(always)]
pub(super) fn butterflies(x: &mut [f32], mut n: usize) {
    if n == 1 && x.len().is_multiple_of(LANES) {
        x.as_chunks_mut().0.iter_mut().for_each(near);
        n = LANES;
    }
    while n < x.len() {
        for both in x.chunks_exact_mut(2 * n) {
            let (a, b) = both.split_at_mut(n);
            for (a, b) in a.iter_mut().zip(b) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        n *= 2;
    }
}

/// Sylvester's matrix of [`LANES`] rows.
const NEAR: [[f32; LANES]; LANES] = {
    let mut rows = [[1.0; LANES]; LANES];
    let mut i = 0;
    while i < LANES * LANES {
        if ((i / LANES) & (i % LANES)).count_ones() % 2 == 1 {
            rows[i / LANES][i % LANES] = -1.0;
        }
        i += 1;
    }
    rows
};

/// The same at distances below [`LANES`]. Multiplying a vector by a number is faster than moving numbers within one.
#[inline(always)]
fn near(x: &mut [f32; LANES]) {
    let mut sums = [0.0_f32; LANES];
    for (v, row) in x.iter().zip(&NEAR) {
        for i in 0..LANES {
            sums[i] += v * row[i];
        }
    }
    *x = sums;
}

/// Blocks (size / rest, rest) as (rest, size / rest).
#[inline(always)]
fn transpose(x: &[f32], rest: usize, size: usize, y: &mut [f32]) {
    for (x, y) in x.chunks_exact(size).zip(y.chunks_exact_mut(size)) {
        for (i, y) in y.chunks_exact_mut(size / rest).enumerate() {
            for (y, x) in y.iter_mut().zip(x[i..].iter().step_by(rest)) {
                *y = *x;
            }
        }
    }
}

/// Blocks of `x`, (n, rest), times a matrix on their first axis, as (rest, n). `columns` has n rows.
#[inline(always)]
fn multiply<T: Number>(
    panels: &[[T; LANES]],
    rest: usize,
    x: &[f32],
    y: &mut [f32],
    columns: &mut [[f32; COLUMNS]],
) {
    let n = columns.len();
    for (group, y) in y.chunks_mut(COLUMNS * n).enumerate() {
        for (j, column) in (group * COLUMNS..).take(y.len() / n).enumerate() {
            let from = x[column / rest * n * rest + column % rest..].iter().step_by(rest);
            columns.iter_mut().zip(from).for_each(|(to, x)| to[j] = *x);
        }
        for (p, panel) in panels.chunks_exact(n).enumerate() {
            let mut sums = [[0.0_f32; LANES]; COLUMNS];
            for (row, x) in panel.iter().zip(&*columns) {
                for i in 0..LANES {
                    let v = row[i].value();
                    for j in 0..COLUMNS {
                        sums[j][i] += v * x[j];
                    }
                }
            }
            for (y, sums) in y.chunks_exact_mut(n).zip(&sums) {
                let y = &mut y[p * LANES..];
                let live = y.len().min(LANES);
                y[..live].copy_from_slice(&sums[..live]);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test says by a panic what is wrong
mod tests {
    use super::{Factor, Kind, Transform};
    use loopq_core::simd::Isa;

    fn wave(n: usize, by: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * by).sin()).collect()
    }

    fn sylvester(n: usize) -> Vec<f32> {
        let sign = |i: usize| if ((i / n) & (i % n)).count_ones() % 2 == 1 { -0.5 } else { 0.5 };
        (0..n * n).map(sign).collect()
    }

    /// Sylvester's matrix with other signs of its columns.
    fn signed(n: usize) -> Vec<f32> {
        let columns: Vec<f32> = wave(n, 0.9).iter().map(|v| v.signum()).collect();
        sylvester(n).iter().enumerate().map(|(i, v)| v * columns[i % n]).collect()
    }

    fn signs(n: usize) -> Vec<f32> {
        wave(n * n, 0.7).iter().map(|v| 0.25 * v.signum()).collect()
    }

    /// Matrices of the factors of each kind of block, with the number of blocks.
    fn cases() -> Vec<Vec<(usize, Vec<Vec<f32>>)>> {
        vec![
            vec![(1, vec![signs(20), sylvester(8)])],
            vec![(3, vec![signed(64)]), (1, vec![sylvester(16)])],
            vec![(2, vec![signed(8), signed(4)])],
            vec![(1, vec![sylvester(4), wave(25, 0.3), sylvester(2), signs(12)])],
            vec![(5, vec![sylvester(16)]), (1, vec![wave(9, 0.3)])],
            vec![(2, vec![signs(36)]), (3, vec![sylvester(1)])],
        ]
    }

    fn side(matrix: &[f32]) -> usize {
        matrix.len().isqrt()
    }

    fn made(case: &[(usize, Vec<Vec<f32>>)]) -> Transform {
        let factor = |m: &Vec<f32>| Factor::matrix(side(m), m).unwrap();
        Transform::new(case.iter().map(|(n, ms)| (*n, ms.iter().map(factor).collect())).collect()).unwrap()
    }

    /// One block of a token by the elements of its Kronecker product.
    fn dense(matrices: &[Vec<f32>], x: &[f32]) -> Vec<f64> {
        let element = |mut i: usize, mut j: usize| {
            matrices.iter().rev().fold(1.0, |product, m| {
                let n = side(m);
                let factor = f64::from(m[i % n * n + j % n]);
                (i, j) = (i / n, j / n);
                product * factor
            })
        };
        (0..x.len()).map(|i| (0..x.len()).map(|j| element(i, j) * f64::from(x[j])).sum()).collect()
    }

    #[test]
    fn factors_give_what_their_dense_matrix_gives() {
        for case in cases() {
            let transform = made(&case);
            let x = wave(transform.inputs() * 6, 0.37);
            let y = transform.apply(&x, Isa::best()).unwrap();
            let mut at = 0;
            for _ in 0..6 {
                for (count, matrices) in &case {
                    let size = matrices.iter().map(|m| side(m)).product::<usize>();
                    for _ in 0..*count {
                        let exact = dense(matrices, &x[at..at + size]);
                        for (y, exact) in y[at..].iter().zip(exact) {
                            assert!((f64::from(*y) - exact).abs() < 2e-5, "{y}, not {exact}");
                        }
                        at += size;
                    }
                }
            }
            assert_eq!(at, x.len());
        }
    }

    #[test]
    fn bits_depend_neither_on_instructions_nor_on_tokens_at_once() {
        for case in cases() {
            let transform = made(&case);
            let x = wave(transform.inputs() * 7, 0.37);
            let y = transform.apply(&x, Isa::PORTABLE).unwrap();
            for isa in Isa::available() {
                for tokens in [1, 3, 7] {
                    let parts = x.chunks(tokens * transform.inputs());
                    let found: Vec<_> = parts.flat_map(|x| transform.apply(x, isa).unwrap()).collect();
                    assert_eq!(found, y, "{} {tokens}", isa.name());
                }
            }
        }
    }

    #[test]
    fn divisors_divide_and_may_stand_beside_matrices() {
        let by = Factor::divisors(&[2.0, 4.0]).unwrap();
        let pair = Factor::matrix(2, &sylvester(2)).unwrap();
        let transform = Transform::new(vec![(2, vec![by.clone()]), (1, vec![by, pair])]).unwrap();
        let y = transform.apply(&[2.0, 4.0, 8.0, 8.0, 2.0, 4.0, 8.0, 16.0], Isa::best()).unwrap();
        assert_eq!(y, [1.0, 1.0, 4.0, 2.0, 1.5, -0.5, 3.0, -1.0]);
    }

    #[test]
    fn matrices_of_hadamards_kind_are_recognised() {
        let kind = |n, m: &[f32]| Factor::matrix(n, m).unwrap().kind;
        assert_eq!(kind(8, &sylvester(8)), Kind::Sylvester(vec![1.0; 8]));
        assert!(matches!(kind(8, &signed(8)), Kind::Sylvester(signs) if signs.contains(&-1.0)));
        let mut other = sylvester(8);
        other[9] = -other[9];
        assert!(matches!(kind(8, &other), Kind::Signs(_)));
        other[9] *= 2.0;
        assert!(matches!(kind(8, &other), Kind::Numbers(_)));
        assert!(matches!(kind(2, &[0.0; 4]), Kind::Numbers(_)));
        assert!(matches!(kind(2, &[f32::NAN; 4]), Kind::Numbers(_)));
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        assert!(Factor::matrix(3, &[1.0; 8]).is_err());
        let none = Factor::matrix(0, &[]).unwrap();
        let pair = Factor::matrix(2, &sylvester(2)).unwrap();
        for blocks in [vec![(1, vec![none])], vec![(0, vec![pair.clone()])], vec![(usize::MAX, vec![pair])]] {
            assert!(Transform::new(blocks).is_err());
        }
    }
}
