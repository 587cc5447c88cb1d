// rustc --edition 2021 -O reduce.rs && ./reduce transform.safetensors vectors.csv
use std::{env, fs};

/// Return the text between two others, the first of which comes after `name`.
fn between<'a>(header: &'a str, name: &str, start: &str, end: &str) -> &'a str {
    let rest = header.split_once(&format!("\"{name}\":")).expect(name).1;
    rest.split_once(start).expect(start).1.split_once(end).expect(end).0
}

/// Return the numbers of a tensor, `data` being what follows the header.
fn numbers(header: &str, data: &[u8], name: &str) -> Vec<f64> {
    let offsets = between(header, name, "\"data_offsets\":[", "]");
    let (from, to) = offsets.split_once(',').expect("two offsets");
    let bytes = &data[from.parse().expect("a number")..to.parse().expect("a number")];
    let number = |four: &[u8]| f32::from_le_bytes(four.try_into().expect("four bytes"));
    bytes.chunks(4).map(|four| f64::from(number(four))).collect()
}

fn unit(x: Vec<f64>) -> Vec<f64> {
    let length = x.iter().map(|number| number * number).sum::<f64>().sqrt();
    if length == 0.0 {
        return x;
    }
    x.iter().map(|number| number / length).collect()
}

fn main() {
    let paths: Vec<String> = env::args().collect();
    let file = fs::read(&paths[1]).expect("a transform");
    let length = u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize;
    let (header, data) = file[8..].split_at(length);
    let header = std::str::from_utf8(header).expect("UTF-8");
    let (matrix, bias) = (numbers(header, data, "matrix"), numbers(header, data, "bias"));
    let (k, d) = (bias.len(), matrix.len() / bias.len());
    let unit_first = between(header, "normalize_input", "\"", "\"") == "true";
    let unit_last = between(header, "similarity", "\"", "\"") == "cosine";
    println!("{}", between(header, "query_digest", "\"", "\""));
    for line in fs::read_to_string(&paths[2]).expect("vectors").lines() {
        let row = line.split(',').take(d).map(|number| number.parse().expect("a number"));
        let mut x: Vec<f64> = row.collect();
        if unit_first {
            x = unit(x);
        }
        let mut y = bias.clone();
        for (n, number) in matrix.iter().enumerate() {
            y[n % k] += x[n / k] * number;
        }
        if unit_last {
            y = unit(y);
        }
        let shown: Vec<String> = y.iter().map(f64::to_string).collect();
        println!("{}", shown.join(","));
    }
}
