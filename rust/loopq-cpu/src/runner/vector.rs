//! Operations between products, element by element: norms, gates, the exponential function and sums of products.

use loopq_core::memory::zeros;
use loopq_core::simd::per_isa;
use loopq_core::{dims, Result};

/// Sums that are taken side by side; their number fixes the bits of a result on every machine.
const LANES: usize = 32;

/// A number in its storage type.
pub(super) trait Number: Copy + Send + Sync + Default {
    fn value(self) -> f32;
    fn of(value: f32) -> Self;
}

impl Number for f32 {
    #[inline(always)]
    fn value(self) -> f32 {
        self
    }
    #[inline(always)]
    fn of(value: f32) -> Self {
        value
    }
}

impl Number for i8 {
    #[inline(always)]
    fn value(self) -> f32 {
        f32::from(self)
    }
    #[inline(always)]
    fn of(value: f32) -> Self {
        value as Self
    }
}

/// The bits of a bfloat16 number.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub(super) struct Half(u16);

impl Number for Half {
    #[inline(always)]
    fn value(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
    #[inline(always)]
    fn of(value: f32) -> Self {
        Self(half::bf16::from_f32(value).to_bits())
    }
}

impl Half {
    /// Bits as numbers.
    #[allow(unsafe_code)]
    pub(super) fn slice(bits: &[u16]) -> &[Self] {
        // SAFETY: the type is transparent over `u16`.
        unsafe { std::slice::from_raw_parts(bits.as_ptr().cast(), bits.len()) }
    }
}

/// Sum of products, in lanes that are added in pairs.
#[inline(always)]
fn dot<T: Number>(a: &[f32], b: &[T]) -> f32 {
    let mut sums = [0.0_f32; LANES];
    let whole = a.len() / LANES * LANES;
    for (a, b) in a[..whole].chunks_exact(LANES).zip(b[..whole].chunks_exact(LANES)) {
        for i in 0..LANES {
            sums[i] += a[i] * b[i].value();
        }
    }
    for (i, (a, b)) in a[whole..].iter().zip(&b[whole..a.len()]).enumerate() {
        sums[i] += a * b.value();
    }
    let mut n = LANES;
    while n > 1 {
        n /= 2;
        for i in 0..n {
            sums[i] += sums[i + n];
        }
    }
    sums[0]
}

/// `e^x` for x from -87 to 88, where it is a normal number; x outside is clamped. Within 2 units in the last place.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // Their sum is ln 2; the first has so few digits that its products with whole numbers are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    const TAYLOR: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let x = x.clamp(-87.0, 88.0);
    let n = (x * LOG2_E).round_ties_even();
    let r = (x - n * LN_2[0]) - n * LN_2[1];
    let mut y = 1.0 / 5040.0;
    for c in TAYLOR {
        y = y * r + c;
    }
    y * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

#[inline(always)]
fn norm_body(x: &[f32], weight: &[f32], epsilon: f32, y: &mut [f32]) {
    let mean = dot(x, x) / x.len() as f32;
    let by = 1.0 / (mean + epsilon).sqrt();
    for (y, (x, w)) in y.iter_mut().zip(x.iter().zip(weight)) {
        *y = x * by * w;
    }
}

per_isa! {
    /// `y = x / sqrt(mean(x^2) + epsilon) * weight`.
    pub(super) fn norm(x: &[f32], weight: &[f32], epsilon: f32, y: &mut [f32]) = norm_body;
}

#[inline(always)]
fn gated_body(gate: &[f32], up: &[f32], y: &mut [f32]) {
    for (y, (g, u)) in y.iter_mut().zip(gate.iter().zip(up)) {
        *y = g / (1.0 + exp(-g)) * u;
    }
}

per_isa! {
    /// `y = silu(gate) * up`.
    pub(super) fn gated(gate: &[f32], up: &[f32], y: &mut [f32]) = gated_body;
}

#[inline(always)]
fn opened_body(gate: &[f32], y: &mut [f32]) {
    for (y, g) in y.iter_mut().zip(gate) {
        *y /= 1.0 + exp(-g);
    }
}

per_isa! {
    /// `y = sigmoid(gate) * y`.
    pub(super) fn opened(gate: &[f32], y: &mut [f32]) = opened_body;
}

#[inline(always)]
fn rows_body<T: Number>(weights: &[T], x: &[f32], y: &mut [f32]) {
    for (y, row) in y.iter_mut().zip(weights.chunks_exact(x.len())) {
        *y = dot(x, row);
    }
}

per_isa! {
    /// `y = W x` for some rows of W.
    pub(super) fn rows<T: Number>(weights: &[T], x: &[f32], y: &mut [f32]) = rows_body;
}

/// Rows of numbers, however they are stored.
pub(super) trait Rows: Copy {
    /// Row `i`, as long as `room`, which it may use.
    fn row<'a>(&'a self, i: usize, room: &'a mut [f32]) -> &'a [f32];
}

impl Rows for &[f32] {
    #[inline(always)]
    fn row<'a>(&'a self, i: usize, room: &'a mut [f32]) -> &'a [f32] {
        &self[i * room.len()..(i + 1) * room.len()]
    }
}

impl Rows for &[Half] {
    #[inline(always)]
    fn row<'a>(&'a self, i: usize, room: &'a mut [f32]) -> &'a [f32] {
        let row = &self[i * room.len()..];
        for (to, v) in room.iter_mut().zip(row) {
            *to = v.value();
        }
        room
    }
}

/// Working memory of attention to some tokens.
#[derive(Debug)]
pub(super) struct Room {
    tokens: usize,
    row: Vec<f32>,
    sums: Vec<f32>,
    weights: Vec<f32>,
}

impl Room {
    /// For so many queries of a width, to at most so many tokens.
    pub(super) fn new(queries: usize, width: usize, tokens: usize) -> Result<Self> {
        let weights = zeros("attention weights", dims::product("attention weights", queries, tokens)?)?;
        let [sums, row] = [zeros("attention weights", queries)?, zeros("a key or value", width)?];
        Ok(Self { tokens, row, sums, weights })
    }

    /// Width of a query.
    pub(super) fn width(&self) -> usize {
        self.row.len()
    }

    /// The same for the first tokens alone.
    pub(super) fn first(&mut self, tokens: usize) -> &mut Self {
        self.tokens = tokens;
        self
    }
}

/// All queries use a row while it is in cache; each has its own sums, in the order of the tokens.
#[inline(always)]
fn attend_body<R: Rows>(queries: &[f32], keys: R, values: R, room: &mut Room, y: &mut [f32]) {
    let Room { tokens, row, sums, weights } = room;
    let (tokens, width) = (*tokens, row.len());
    for i in 0..tokens {
        let key = keys.row(i, row);
        for (q, weights) in queries.chunks_exact(width).zip(weights.chunks_exact_mut(tokens)) {
            weights[i] = dot(q, key);
        }
    }
    for (sum, weights) in sums.iter_mut().zip(weights.chunks_exact_mut(tokens)) {
        let largest = weights.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        *sum = 0.0;
        for weight in weights {
            *weight = exp(*weight - largest);
            *sum += *weight;
        }
    }
    y.fill(0.0);
    for i in 0..tokens {
        let value = values.row(i, row);
        for (y, weights) in y.chunks_exact_mut(width).zip(weights.chunks_exact(tokens)) {
            for (y, value) in y.iter_mut().zip(value) {
                *y += weights[i] * value;
            }
        }
    }
    for (y, sum) in y.chunks_exact_mut(width).zip(sums) {
        for y in y.iter_mut() {
            *y /= *sum;
        }
    }
}

per_isa! {
    /// Softmax attention of some queries to tokens: `y = sum_i softmax(q k)_i v_i` for each.
    pub(super) fn attend<R: Rows>(queries: &[f32], keys: R, values: R, room: &mut Room, y: &mut [f32]) = attend_body;
}

/// Rotates pairs of a head by their angles, given as (cos, sin) pairs. Pairs are neighbours or lie in the two halves.
pub(super) fn rotate(x: &mut [f32], angles: &[f32], neighbours: bool) {
    let half = x.len() / 2;
    for (i, angle) in angles.chunks_exact(2).enumerate() {
        let (a, b) = if neighbours { (2 * i, 2 * i + 1) } else { (i, i + half) };
        let (cos, sin) = (angle[0], angle[1]);
        (x[a], x[b]) = (x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test says by a panic what is wrong
mod tests {
    use super::super::coded::Coded;
    use super::{attend, exp, gated, norm, opened, rotate, rows, Half, Number, Room};
    use loopq_core::simd::Isa;

    fn wave(n: usize, by: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * by).sin()).collect()
    }

    #[test]
    fn the_exponential_is_within_two_units_in_the_last_place() {
        for i in -8700..=8800 {
            let x = i as f32 / 100.0;
            let (found, exact) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((found - exact).abs() <= exact * 2.4e-7, "exp({x}) = {found}, not {exact}");
        }
        assert!(exp(f32::NEG_INFINITY) < 1e-37 && exp(1000.0) > 1e38);
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let (x, w) = (wave(77, 0.7), wave(77 * 5, 0.3));
        let half: Vec<Half> = w.iter().map(|&v| Half::of(v)).collect();
        let (mut four, mut eight) = (Vec::new(), Vec::new());
        for row in w.chunks_exact(38).take(5) {
            Coded::<4>::push(&mut four, row);
            Coded::<8>::push(&mut eight, row);
        }
        let run = |isa: Isa| {
            let mut out = vec![1.0; 77 * 5 + 10 + 152];
            let (opening, rest) = out.split_at_mut(77);
            let (a, rest) = rest.split_at_mut(77);
            let (b, rest) = rest.split_at_mut(77);
            let (c, rest) = rest.split_at_mut(5);
            let (d, rest) = rest.split_at_mut(5);
            norm(isa, &x, &w[..77], 1e-6, a);
            gated(isa, &x, &w[..77], b);
            opened(isa, &x, opening);
            rows(isa, &w, &x, c);
            rows(isa, &half, &x, d);
            let mut room = Room::new(1, 77, 5).unwrap();
            attend(isa, &x, &half[..], &half[..], &mut room, &mut rest[..77]);
            let (e, rest) = rest[77..].split_at_mut(76);
            let mut room = Room::new(2, 38, 5).unwrap();
            attend(isa, &x[..76], Coded::<4>(&four), Coded::<4>(&four), &mut room, e);
            attend(isa, &x[..76], Coded::<8>(&eight), Coded::<8>(&eight), &mut room, &mut rest[..76]);
            out.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        };
        for isa in Isa::available() {
            assert_eq!(run(isa), run(Isa::PORTABLE), "{}", isa.name());
        }
    }

    #[test]
    fn sums_are_those_of_float64() {
        let (x, w) = (wave(77, 0.7), wave(77 * 5, 0.3));
        let mut y = [0.0; 5];
        rows(Isa::best(), &w, &x, &mut y);
        for (y, row) in y.iter().zip(w.chunks_exact(77)) {
            let exact: f64 = row.iter().zip(&x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            assert!((f64::from(*y) - exact).abs() < 1e-5);
        }
        let mut y = vec![0.0; 77];
        attend(Isa::best(), &x, &w[..], &w[..], &mut Room::new(1, 77, 5).unwrap(), &mut y);
        let scores: Vec<f64> = w
            .chunks_exact(77)
            .map(|k| k.iter().zip(&x).map(|(a, b)| f64::from(a * b)).sum::<f64>().exp())
            .collect();
        let sum: f64 = scores.iter().sum();
        for (i, y) in y.iter().enumerate() {
            let exact: f64 =
                scores.iter().zip(w.chunks_exact(77)).map(|(s, v)| s / sum * f64::from(v[i])).sum();
            assert!((f64::from(*y) - exact).abs() < 1e-5);
        }
    }

    #[test]
    fn a_quarter_turn_moves_each_pair() {
        let mut x = [1.0, 2.0, 3.0, 4.0];
        rotate(&mut x, &[0.0, 1.0, 0.0, 1.0], true);
        assert_eq!(x, [-2.0, 1.0, -4.0, 3.0]);
        let mut x = [1.0, 2.0, 3.0, 4.0];
        rotate(&mut x, &[0.0, 1.0, 0.0, 1.0], false);
        assert_eq!(x, [-3.0, -4.0, 1.0, 2.0]);
    }
}
