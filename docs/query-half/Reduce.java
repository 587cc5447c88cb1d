// java Reduce.java transform.safetensors vectors.csv
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.regex.Pattern;
import java.util.stream.Collectors;

class Reduce {
    static String header;
    static ByteBuffer file;

    /** Return what a pattern has in brackets, of the first place in the header where it fits. */
    static String[] find(String pattern) {
        var found = Pattern.compile(pattern).matcher(header).results().findFirst().orElseThrow();
        return new String[] {found.group(1), found.groupCount() > 1 ? found.group(2) : ""};
    }

    static double[] numbers(String name) {
        var offsets = find("\"" + name + "\":\\{[^}]*\"data_offsets\":\\[(\\d+),(\\d+)\\]");
        int start = 8 + (int) file.getLong(0) + Integer.parseInt(offsets[0]);
        var found = new double[(Integer.parseInt(offsets[1]) - Integer.parseInt(offsets[0])) / 4];
        Arrays.setAll(found, n -> file.getFloat(start + 4 * n));
        return found;
    }

    static double[] unit(double[] x) {
        double length = Math.sqrt(Arrays.stream(x).map(number -> number * number).sum());
        return length == 0 ? x : Arrays.stream(x).map(number -> number / length).toArray();
    }

    public static void main(String[] paths) throws Exception {
        file = ByteBuffer.wrap(Files.readAllBytes(Path.of(paths[0]))).order(ByteOrder.LITTLE_ENDIAN);
        header = new String(file.array(), 8, (int) file.getLong(0), StandardCharsets.UTF_8);
        double[] matrix = numbers("matrix"), bias = numbers("bias");
        int k = bias.length, d = matrix.length / k;
        boolean unitFirst = find("\"normalize_input\":\"(\\w+)\"")[0].equals("true");
        boolean unitLast = find("\"similarity\":\"(\\w+)\"")[0].equals("cosine");
        System.out.println(find("\"query_digest\":\"(\\w+)\"")[0]);
        for (String line : Files.readAllLines(Path.of(paths[1]))) {
            double[] row = Arrays.stream(line.split(",")).mapToDouble(Double::parseDouble).toArray();
            double[] x = unitFirst ? unit(Arrays.copyOf(row, d)) : Arrays.copyOf(row, d);
            double[] y = bias.clone();
            for (int n = 0; n < matrix.length; n++) y[n % k] += x[n / k] * matrix[n];
            y = unitLast ? unit(y) : y;
            System.out.println(
                    Arrays.stream(y).mapToObj(String::valueOf).collect(Collectors.joining(",")));
        }
    }
}
