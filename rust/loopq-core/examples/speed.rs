use loopq_core::{dump::*, hessian::*, simd::Isa, Watch};
use std::time::Instant;
fn cpu() -> f64 {
    let s = std::fs::read_to_string("/proc/self/stat").unwrap();
    let f: Vec<&str> = s.rsplit(')').next().unwrap().split_whitespace().collect();
    (f[11].parse::<f64>().unwrap() + f[12].parse::<f64>().unwrap()) / 100.0
}
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let (d, n, th): (usize, usize, usize) = (
        a[1].parse().unwrap(),
        a[2].parse().unwrap(),
        a[3].parse().unwrap(),
    );
    let x: Vec<f32> = (0..n * d)
        .map(|i| ((i * 2654435761) % 1000003) as f32 / 500001.0 - 1.0)
        .collect();
    let xb: Vec<u16> = x.iter().map(|v| (v.to_bits() >> 16) as u16).collect();
    for isa in Isa::available().into_iter().skip(1) {
        for bf in [false, true] {
            let rows = if bf {
                Rows::from_bits16(&xb, RowType::Bf16, n, d)
            } else {
                Rows::from_f32(&x, n, d)
            }
            .unwrap();
            let mut acc = Accumulator::new(Settings {
                dim: d,
                steps: vec![0],
                per_step: false,
                threads: th,
                isa,
            })
            .unwrap();
            acc.update(0, rows, &Watch::new()).unwrap();
            if isa != Isa::best() {
                continue;
            }
            let (mut best, mut bc) = (1e9f64, 1e9f64);
            for _ in 0..a.get(4).map_or(3, |v| v.parse().unwrap()) {
                let (t, c) = (Instant::now(), cpu());
                acc.update(0, rows, &Watch::new()).unwrap();
                best = best.min(t.elapsed().as_secs_f64());
                bc = bc.min(cpu() - c);
            }
            let fl = n as f64 * d as f64 * (d + 1) as f64;
            println!("{:12} bf16={bf} wall {best:.3} s real-GF/s {:.1} (full-equivalent {:.1}); per cpu-second {:.1}", isa.name(), fl / best / 1e9, 2.0 * fl / best / 1e9, fl / bc / 1e9);
        }
    }
}
