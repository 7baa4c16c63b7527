//! A weight that a loop calls four times, rounded to three bits against the inputs of its first call and of all.
//!
//! `cargo run --release --example solve` prints the error of each on the inputs of all four calls.

use loopq_core::dump::Rows;
use loopq_core::factor::{DampedFactor, Order, Symmetric};
use loopq_core::gptq::{gptq, Options, Scales};
use loopq_core::grid::{dequantize, rtn, Grid, Quantized, ScaleType, Search, Values};
use loopq_core::hessian::{Accumulator, Settings};
use loopq_core::simd::Isa;
use loopq_core::{proxy, Cancel, Execution, Result, Weight};

const OUTPUTS: usize = 96;
const DIM: usize = 128;
const ROWS: usize = 512;
const STEPS: usize = 4;
const RANK: usize = 16;

/// Reproducible numbers in -1..1, by xorshift.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Inputs of a step: sums of few directions, at each step others.
fn inputs(step: usize) -> Vec<f32> {
    let directions = noise(RANK * DIM, 101 + step as u64);
    let mut x = vec![0.0; ROWS * DIM];
    for (row, shares) in x.chunks_exact_mut(DIM).zip(noise(ROWS * RANK, 11 + step as u64).chunks_exact(RANK))
    {
        for (share, direction) in shares.iter().zip(directions.chunks_exact(DIM)) {
            row.iter_mut().zip(direction).for_each(|(x, d)| *x += share * d);
        }
    }
    x
}

fn main() -> Result<()> {
    let cancel = Cancel::new();
    let execution = Execution { threads: 0, cancel: &cancel };
    let isa = Isa::best();

    // H_t of each step, summed exactly: any order and any number of threads gives the same bits.
    let steps = (0..STEPS).collect();
    let settings = Settings { dim: DIM, steps, per_step: true, threads: 0, isa };
    let mut sums = Accumulator::new(settings)?;
    for step in 0..STEPS {
        let x = inputs(step);
        sums.update(step, Rows::from_f32(&x, ROWS, DIM)?, &cancel)?;
    }
    sums.finish(&cancel)?;

    let values = noise(OUTPUTS * DIM, 7);
    let w = Weight::new("W", &values, OUTPUTS, DIM)?;
    let (scale_type, search) = (ScaleType::F16, Search::Mse);
    let grid = Grid {
        bits: 3,
        group_size: 32,
        symmetric: true,
        signed: false,
        scale_type,
        search,
        values: Values::Even,
    };
    let options = Options { scales: Scales::Group, block_size: 128, beam: 1, isa };

    let all = sums.matrix(None, &cancel)?;
    // tr(D H D^T), the square error of the outputs on the inputs of all steps.
    let loss = |q: &Quantized| -> Result<f64> {
        let rounded = dequantize(&q.codes, f32::from, &q.scales()?, Some(&q.zeros()?), OUTPUTS, DIM, 32)?;
        let rounded = Weight::new("Q", &rounded, OUTPUTS, DIM)?;
        proxy(w, Some(rounded), Symmetric::f64(&all, DIM)?, &execution)
    };
    let solve = |steps: Option<&[usize]>| -> Result<Quantized> {
        let h = sums.matrix(steps, &cancel)?;
        let mean = (0..DIM).map(|i| h[i * DIM + i]).sum::<f64>() / DIM as f64;
        let damping = vec![0.01 * mean; DIM];
        let factor =
            DampedFactor::<f32>::new(Symmetric::f64(&h, DIM)?, &damping, Order::Natural, &execution)?;
        Ok(gptq(w, &factor, &grid, &options, &execution)?.0)
    };
    println!("{OUTPUTS} x {DIM}, INT3 in groups of 32; square error over {STEPS} steps");
    println!("rounding          {:9.1}", loss(&rtn(w, &grid, &execution)?)?);
    println!("GPTQ, first step  {:9.1}", loss(&solve(Some(&[0]))?)?);
    println!("GPTQ, all steps   {:9.1}", loss(&solve(None)?)?);
    Ok(())
}
