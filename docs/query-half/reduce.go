// go run reduce.go transform.safetensors vectors.csv
package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strings"
)

func main() {
	file := must(os.ReadFile(os.Args[1]))
	start := 8 + binary.LittleEndian.Uint64(file)
	var header struct {
		Metadata     map[string]string `json:"__metadata__"`
		Matrix, Bias struct{ Data_offsets [2]uint64 }
	}
	must(0, json.Unmarshal(file[8:start], &header))
	numbers := func(offsets [2]uint64) (found []float64) {
		for at := start + offsets[0]; at < start+offsets[1]; at += 4 {
			found = append(found, float64(math.Float32frombits(binary.LittleEndian.Uint32(file[at:]))))
		}
		return found
	}
	matrix, bias := numbers(header.Matrix.Data_offsets), numbers(header.Bias.Data_offsets)
	fmt.Println(header.Metadata["query_digest"])
	for _, line := range strings.Fields(string(must(os.ReadFile(os.Args[2])))) {
		var x []float64
		must(0, json.Unmarshal([]byte("["+line+"]"), &x))
		x = unit(x[:len(matrix)/len(bias)], header.Metadata["normalize_input"] == "true")
		y := append([]float64{}, bias...)
		for n, number := range matrix {
			y[n%len(bias)] += x[n/len(bias)] * number
		}
		y = unit(y, header.Metadata["similarity"] == "cosine")
		fmt.Println(strings.ReplaceAll(strings.Trim(fmt.Sprint(y), "[]"), " ", ","))
	}
}

func unit(x []float64, wanted bool) []float64 {
	sum := 0.0
	for _, number := range x {
		sum += number * number
	}
	for n := range x {
		if wanted && sum > 0 {
			x[n] /= math.Sqrt(sum)
		}
	}
	return x
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}
